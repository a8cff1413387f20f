"""Forward kernel for Hopper whose blocks take tiles of many query rows and tiles of few."""

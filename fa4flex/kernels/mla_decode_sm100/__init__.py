"""The Blackwell kernel for few queries over latent rows."""

"""The Hopper forward pipeline: a TMA producer warp feeds wgmma consumer warpgroups."""

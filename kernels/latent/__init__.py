"""Latent attention of rounds, and what writes latents to their pages, also in e4m3."""

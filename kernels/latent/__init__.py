"""Latent attention of rounds, and what writes latents to their pages."""

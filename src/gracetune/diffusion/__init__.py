"""Stateless maths: objectives, timesteps, weighting, noise."""

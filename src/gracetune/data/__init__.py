"""Datasets: staged in memory, bucketed, resumable; images, video, audio and edit pairs."""

"""Propose a first config for a folder of images, clips or sounds, as `gracetune init` does."""

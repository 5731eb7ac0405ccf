"""Datasets of images, video, audio and edit pairs: storage, staging, buckets, captions and a resumable loader."""

from pathlib import Path


def load_audio(source):
    return Path(source).read_bytes()


def load_audio_from_video(source, target_sample_rate=16000, target_channels=1):
    return Path(source).read_bytes()

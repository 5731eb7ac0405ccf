from io import BytesIO
from pathlib import Path

import torch


def load_image(img_data):
    return img_data if isinstance(img_data, bytes) else Path(img_data).read_bytes()


def load_video(vid_data):
    return Path(vid_data).read_bytes()


class LocalDataBackend:
    def __init__(self, accelerator, id, compress_cache=False):
        self.accelerator, self.id, self.type, self.compress_cache = accelerator, id, "local", compress_cache

    @staticmethod
    def from_instance_representation(representation):
        return LocalDataBackend(accelerator=None, id=representation["id"])

    def read(self, filepath, as_byteIO=False):  # noqa: N803
        found = Path(filepath).read_bytes()
        return BytesIO(found) if as_byteIO else found

    def write(self, filepath, data):
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            Path(filepath).write_bytes(data)
        else:
            self.torch_save(data, filepath)

    def delete(self, filepath):
        Path(filepath).unlink()

    def exists(self, filepath):
        return Path(filepath).exists()

    def open_file(self, filepath, mode):
        return Path(filepath).open(mode)

    def list_files(self, file_extensions, instance_data_dir):
        found = [path for path in sorted(Path(instance_data_dir).rglob("*")) if path.suffix[1:] in file_extensions]
        return [(instance_data_dir, [], [str(path.absolute()) for path in found])]

    def read_image(self, filepath, delete_problematic_images=False):
        return (load_video if filepath.endswith(".mp4") else load_image)(filepath)

    def torch_load(self, filename):
        return torch.load(filename, map_location="cpu", weights_only=True)

    def torch_save(self, data, original_location):
        torch.save(data, original_location)

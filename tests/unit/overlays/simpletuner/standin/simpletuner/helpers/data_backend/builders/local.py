from simpletuner.helpers.data_backend.local import LocalDataBackend


class LocalBackendBuilder:
    def _create_backend(self, config):
        return LocalDataBackend(accelerator=None, id=config.id)

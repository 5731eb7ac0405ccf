"""As upstream's: the trainer is made and goes through its stations."""

import json
import sys

from simpletuner.helpers.training.trainer import Trainer

if __name__ == "__main__":
    trainer = Trainer(exit_on_error=True)
    trainer.init_preprocessing_models()
    trainer.init_data_backend()
    trainer.resume_and_prepare()
    trainer.train()
    print(json.dumps({"seen": trainer.seen, "arguments": sys.argv[1:], "path": sys.path[0]}))

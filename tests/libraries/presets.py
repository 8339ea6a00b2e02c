"""Small models in place of the presets that `docs/how_to/libraries/` downloads.

Run by `tests/harness/pages.py` on all ranks, before these pages.
"""

from pathlib import Path

import keras_hub
from harness.library_ways.hub import bert, gpt2, gpt2_preprocessor, retinanet, vit

import keras_dist

for task, name, make in (
    ("CausalLM", "gpt2_base_en", lambda: gpt2(gpt2_preprocessor())),
    ("TextClassifier", "bert_tiny_en_uncased", bert),
    ("ImageClassifier", "vit_base_patch16_224_imagenet", vit),
    ("ObjectDetector", "retinanet_resnet50_fpn_coco", retinanet),
):
    folder = Path(name).resolve()
    with keras_dist.first_rank() as is_first:
        if is_first:
            make().save_to_preset(str(folder))
    # Where a preset is looked for: a name of Kaggle, or a folder.
    getattr(keras_hub.models, task).presets[name]["kaggle_handle"] = str(folder)

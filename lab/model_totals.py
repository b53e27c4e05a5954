"""Prints the numbers of parameters of models, as foremoe reads them from config.json files.

    python lab/model_totals.py FOLDER [--transformers]

FOLDER contains config.json files under any names ending in .json. Each row has the file, its MoE layers, parameters in
routed experts and in total in 1e9, or the reason why foremoe does not read it. With --transformers, the last column is
the deviation from the installed transformers' model, built without memory, and rows above 0.2 % are marked. It counts
norms and biases, which foremoe does not; a dash marks types that it does not know.
"""

import argparse
import json
import sys
from pathlib import Path

import foremoe

MARKED_PERCENT = 0.2


def transformers_total(path):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    config = json.loads(path.read_text())
    for key in "auto_map", "quantization_config":
        config.pop(key, None)
    model_type = config.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    config = CONFIG_MAPPING[model_type].from_dict(config)
    kinds = AutoModelForImageTextToText, AutoModelForCausalLM
    kind = next(kind for kind in kinds if type(config) in kind._model_mapping)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind.from_config(config).parameters())


def row(path, compare):
    try:
        model = foremoe.model_parameters(str(path))
    except foremoe.InputError as error:
        return [path.stem, "-", "-", str(error).splitlines()[0].removeprefix(f"{path}: "), ""]
    deviation = ""
    if compare:
        expected = transformers_total(path)
        percent = None if expected is None else 100 * (model["total"] / expected - 1)
        mark = "" if percent is None or abs(percent) <= MARKED_PERCENT else " !"
        deviation = "-" if percent is None else f"{percent:+.3f} %{mark}"
    return [
        path.stem,
        str(model["moe_layers"]),
        f"{model['experts'] / 1e9:.3f}",
        f"{model['total'] / 1e9:.3f}",
        deviation,
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--transformers", action="store_true", help="compare with transformers' models")
    given = parser.parse_args()
    paths = sorted(path for path in given.folder.glob("*.json") if "model_type" in json.loads(path.read_text()))
    rows = [row(path, given.transformers) for path in paths]
    for line in [["model", "MoE layers", "experts, 1e9", "total, 1e9", "deviation"], *rows]:
        print(" | ".join(line))
    print(f"{sum(cells[1] != '-' for cells in rows)} of {len(rows)} files were read")


if __name__ == "__main__":
    sys.exit(main())

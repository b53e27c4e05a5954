"""Checks whether planned steps run correctly on this machine, and how fast: `python -m foremoe.torch.doctor`.

hardware.py   the devices, and how ranks use them
ranks.py      runs checks on ranks in processes of their own, with a time limit
layers.py     the layers and routes that checks run
equality.py   planned steps compute what one process computes
checks.py     waits, overlap, speed, bandwidth and failures
report.py     the table, the JSON document and the advice
"""

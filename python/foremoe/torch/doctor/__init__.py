"""Checks whether planned steps run correctly on this machine: `python -m foremoe.torch.doctor`.

hardware.py   what is here, and how ranks can run on it
checks.py     the list of checks, and what a check is
equality.py, waits.py, overlap.py, bandwidth.py, failure.py   the checks
staging.py    what ranks that share one GPU need in the place of NCCL
ranks.py      runs a check on ranks of its own processes, with a time limit
report.py     the table and the JSON document
"""

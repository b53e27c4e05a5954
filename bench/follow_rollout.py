#!/usr/bin/env python3
"""Print the timeline of planning after a rollout, a Markdown table for lab/performance.md.

    bench/follow_rollout.py [--files 12] [--seconds 12] [--foremoe PROGRAM]

Draws trace files with Qwen3-30B-A3B's shape, one for each of the last sequences that the rollout finishes. Moves them
into a folder at even intervals, as rollout workers would, while `foremoe collect --follow` counts them. Then plans for
8 ranks. Times are seconds after the last file appeared, from one run on an otherwise idle machine.
"""

import json
import pathlib
import subprocess
import tempfile
import time

from figures import command_line, table


def run(*command):
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def main():
    parser = command_line(__doc__)
    parser.add_argument("--files", type=int, default=12, help="trace files, of 8 sequences with 8,192 tokens each")
    parser.add_argument("--seconds", type=float, default=12, help="of the rollout")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        drawn, folder = pathlib.Path(name, "drawn"), pathlib.Path(name, "rollout")
        drawn.mkdir(), folder.mkdir()
        for i in range(arguments.files):
            run(arguments.foremoe, "synth", "--kind", "trace", "--shape", "Qwen3-30B-A3B", "--ranks", 4, "--micro-steps", 2, "--sequences-per-rank", 1,
                "--tokens-per-rank", 8192, "--seed", i, "--out", drawn / f"{i:03}.safetensors")  # fmt: skip
        load, plan = pathlib.Path(name, "load"), pathlib.Path(name, "plan")
        begin = time.monotonic()
        collect = subprocess.Popen([arguments.foremoe, "collect", "--follow", folder, "--ranks", "8", "--out", load, "--json"],
                                   stdout=subprocess.PIPE, text=True)  # fmt: skip
        for i, file in enumerate(sorted(drawn.iterdir())):
            time.sleep(max(0.0, begin + (i + 1) * arguments.seconds / arguments.files - time.monotonic()))
            file.rename(folder / file.name)
        pathlib.Path(folder, "done").touch()
        last = time.monotonic()
        counted = json.loads(collect.communicate()[0])
        written = time.monotonic()
        run(arguments.foremoe, "plan", load, "--guest-slots", 1, "--threads", 2, "--out", plan)
        end = time.monotonic()

    seconds_of_all = counted["seconds_counting"]
    table(("", "seconds"), [
        (f"rollout of {counted['sequences']:,} sequences, {counted['tokens']:,} tokens in {arguments.files} files", f"{last - begin:.2f}"),
        ("of these, counting", f"{seconds_of_all:.3f}"),
        (f"batching into {counted['micro_steps']} micro-steps", f"{counted['seconds_batching']:.4f}"),
        ("summing counts of sequences", f"{counted['seconds_summing']:.4f}"),
        ("summing ÷ counting", f"{100 * counted['seconds_summing'] / seconds_of_all:.1f} %"),
        ("from the last file to the load, on disk", f"{written - last:.2f}"),
        ("from the last file to the plan, on disk", f"{end - last:.2f}"),
    ])  # fmt: skip



if __name__ == "__main__":
    main()

"""The ends of a decode step: inputs gathered from the rows, tokens put back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from gpu_harness import DEVICE, MODE, Row, bandwidth, check_equal, integers, poison_, rng, time_us

from penstock.engine.kernels.noise import row_keys
from penstock.engine.kernels.triton.prepare import DecodeInputs, finish_decode, prepare_decode

BLOCK = 16


def test_prepare_and_finish() -> None:
    for count, row_dtype in ((1, torch.int32), (5, torch.int64), (200, torch.int32)):
        max_rows, width = count + 7, 9
        rows = rng.sample(range(max_rows), count)
        padded = [-1 if i % 4 == 3 else row for i, row in enumerate(rows)]
        lengths = [rng.randrange(0, width * BLOCK) for _ in range(max_rows)]
        tokens = [rng.randrange(100000) for _ in range(max_rows)]
        seeds = [rng.getrandbits(64) - 2**63 for _ in range(max_rows)]
        tables = [[rng.randrange(1, 2**27) for _ in range(width)] for _ in range(max_rows)]
        parameters = torch.rand(max_rows, 3).to(DEVICE)
        last_tokens, device_lengths = integers(tokens, torch.int64), integers(lengths, torch.int32)
        device_rows = integers(padded, row_dtype)
        out = DecodeInputs.empty(count, DEVICE)
        for name in DecodeInputs.__slots__:
            poison_(getattr(out, name))
        prepare_decode(
            device_rows,
            last_tokens,
            device_lengths,
            torch.tensor(tables, dtype=torch.int32, device=DEVICE),
            integers(seeds, torch.int64),
            parameters[:, 1],
            BLOCK,
            out,
        )
        sampled = integers([rng.randrange(100000) for _ in range(count)], torch.int64)
        finish_decode(device_rows, sampled, last_tokens, device_lengths)
        if MODE == "compile":
            continue
        at = [lengths[r] if r >= 0 else 0 for r in padded]
        check_equal("tokens", out.token_ids, torch.tensor([tokens[r] if r >= 0 else 0 for r in padded]))
        check_equal("positions", out.positions, torch.tensor(at))
        slots = [tables[r][n // BLOCK] * BLOCK + n % BLOCK if r >= 0 else 0 for r, n in zip(padded, at, strict=True)]
        check_equal("slots", out.slots, torch.tensor(slots))
        contexts = [n + 1 if r >= 0 else 0 for r, n in zip(padded, at, strict=True)]
        check_equal("contexts", out.context_lens, torch.tensor(contexts, dtype=torch.int32))
        keys = row_keys(
            np.array([seeds[r] if r >= 0 else 0 for r in padded], np.int64).view(np.uint64), np.array(at) + 1
        )
        check_equal("keys", out.keys, torch.from_numpy(keys))
        wanted = torch.tensor([float(parameters[r, 1]) if r >= 0 else 0.0 for r in padded])
        check_equal("temperatures", out.temperatures, wanted)
        for row, token in zip(padded, sampled.tolist(), strict=True):
            if row >= 0:
                tokens[row] = token
                lengths[row] += 1
        check_equal("last tokens", last_tokens, torch.tensor(tokens))
        check_equal("lengths", device_lengths, torch.tensor(lengths, dtype=torch.int32))


def bench_prepare() -> Iterator[Row]:
    for count in (1, 256):
        rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
        tokens = torch.ones(count, dtype=torch.int64, device=DEVICE)
        lengths = torch.full((count,), 100, dtype=torch.int32, device=DEVICE)
        tables = torch.ones(count, 512, dtype=torch.int32, device=DEVICE)
        heat, out = torch.ones(count, device=DEVICE), DecodeInputs.empty(count, DEVICE)
        given = (rows, tokens, lengths, tables, tokens, heat, BLOCK, out)
        us = time_us([lambda g=given: prepare_decode(*g)])
        yield bandwidth(f"prepare_decode {count}", us, count * 80)
        # Once per call the lengths grow; the bench never reads them.
        us = time_us([lambda r=rows, t=tokens, n=lengths: finish_decode(r, t, t, n)])
        yield bandwidth(f"finish_decode {count}", us, count * 32)

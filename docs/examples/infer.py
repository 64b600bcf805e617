"""Send arrays to a model many times at once, pinned to devices, and count who answered.

python docs/examples/infer.py http://127.0.0.1:8000 digits image 8 8
"""

import asyncio
import sys
from collections import Counter

import numpy as np

from tidegate import AsyncTidegate
from tidegate.outcome import ServeError


async def main(url: str, model: str, name: str, *shape: str) -> None:
    pixels = np.zeros((1, *map(int, shape)), np.float32)
    async with AsyncTidegate(url, budget_s=2.0) as client:

        async def ask() -> str:
            try:
                return (await client.infer(model, {name: pixels}, pin="edge")).served.by
            except ServeError as error:
                return error.code

        print(dict(Counter(await asyncio.gather(*[ask() for _ in range(20)]))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""Run Kimi-K3 (or its smaller sibling Kimi-Linear) from its GGUF, routed experts on the SSD.

python examples/kimi_k3.py --gguf Kimi-K3-Q2_K-00001-of-00038.gguf \
    --prompt "The lighthouse keeper" --max-new-tokens 64 --vram-budget 60GiB --ram-budget 200GiB
"""

from __future__ import annotations

import sys

from launcher import launch

if __name__ == "__main__":
    sys.exit(launch("Kimi-K3", ("kimi-k3", "kimi-linear"), "The lighthouse keeper"))

"""Run DeepSeek-V4-Flash from its GGUF, with its routed experts on the SSD.

python examples/deepseek_v4_flash.py --gguf DeepSeek-V4-Flash-00001-of-00004.gguf \
    --prompt "The lighthouse keeper" --max-new-tokens 64 --vram-budget 20GiB --ram-budget 32GiB
"""

from __future__ import annotations

import sys

from launcher import launch

if __name__ == "__main__":
    sys.exit(launch("DeepSeek-V4-Flash", ("deepseek4",), "The lighthouse keeper"))

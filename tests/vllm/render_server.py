"""`vllm launch render`, which renders and tokenizes without a model: started by its function, since the `vllm` command
asks for metadata that the package for CPUs does not bring."""

import asyncio
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    asyncio.run(run_launch_fastapi(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])))

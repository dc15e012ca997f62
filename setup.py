"""The extensions in C, which are optional: pyproject.toml says the rest."""

from setuptools import Extension, setup

NATIVE = "cachecore/native/"

setup(
    ext_modules=[
        Extension(
            "cachecore.native._native",
            [NATIVE + name for name in ("module.c", "chains.c", "naming.c", "table.c")],
            depends=[NATIVE + name for name in ("module.h", "blake2b.h")],
            optional=True,  # without a compiler or Python's headers everything runs in Python
        ),
        Extension("cachecore.prompts.native._words", ["cachecore/prompts/native/words.c"], optional=True),
        Extension("cachecore.prompts.native._chats", ["cachecore/prompts/native/chats.c"], optional=True),
        Extension(
            "policies.native._deciding",
            ["policies/native/deciding.c"],
            extra_compile_args=["-ffp-contract=off"],  # its sums are to be Python's, bit by bit
            optional=True,
        ),
        Extension(
            "cachecore.kv.native._kernels",
            ["cachecore/kv/native/kernels.c"],
            extra_compile_args=["-O3", "-ffp-contract=off", "-Wno-psabi"],
            optional=True,
        ),
    ]
)

"""Write docs/reference anew: `make reference`."""

from tests.reference.pages import DIRECTORY, PAGES


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (DIRECTORY / name).write_text(page())
        print(DIRECTORY / name)


if __name__ == "__main__":
    main()

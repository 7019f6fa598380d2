"""`python -m nemo_rl` is the script `nemo-rl`."""

from nemo_rl.cli import main

if __name__ == "__main__":
    main()

"""The program of the ranks of a stage, of all but the first stage."""

import argparse

from keras_dist.tools.check.checks import add_rank_arguments, run_stage

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_rank_arguments(parser)
    run_stage(parser.parse_args())

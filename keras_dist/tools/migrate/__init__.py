"""Rewrite scripts for Horovod's Keras layer, or for Keras 2, to run on Keras 3.

All but `command` needs libcst, which `keras-dist[migrate]` installs.

- `command`: the command `keras-dist migrate`: files in, diff and list out
- `source`: one file: its tree, the rules in their order, the new text
- `script`: what the rules share about a file: nodes, names, values, findings
- `arguments`: change the arguments of a call, and nothing else of its text
- `imports`: Horovod's imports, in all their spellings, and private modules of Keras 2
- `calls`: arguments and methods that Keras 3 no longer takes, of models and optimizers
- `gone`: names, members and arguments that the installed Keras 3 does not have
- `weight_files`: names of files of weights
- `sessions`: sessions of TensorFlow 1
- `fit`: with `--to dist_fit`, Horovod's callbacks and scaling become one call
- `plan`: which lines that call can replace, and its options; or why it cannot
"""

"""Rewrite scripts for Horovod's Keras layer, or for Keras 2, to run on Keras 3.

All but `command` and `report` needs libcst, which `keras-dist[migrate]` installs.

- `command`: the command `keras-dist migrate`: files in, diff and list out
- `report`: what cannot be changed, with its line, reason and replacement
- `source`: one file: its tree, the rules in their order, the new text
- `script`: what the rules share about a file: names, lines, findings
- `names`: which names of a file are Keras's, TensorFlow's or Horovod's
- `scopes`: which of several assignments of a name a line reads
- `arguments`: change the arguments of a call, and nothing else of its text
- `imports`: Horovod's imports, in all their spellings
- `calls`: arguments and methods that Keras 3 no longer takes
- `optimizers`: arguments of optimizers, and `optimizers.legacy`
- `rate`: the learning rate of an optimizer, read and set
- `weight_files`: names of files of weights
- `moved`: modules of Keras 2 whose classes are elsewhere in Keras 3
- `keras_3`: the public names of the installed Keras 3
- `gone`: names, members and arguments that it does not have
- `symbolic`: functions of TensorFlow on symbolic tensors
- `sessions`: sessions of TensorFlow 1
- `fit`: with `--to dist_fit`, Horovod's callbacks and scaling become one call
- `plan`: which lines that call can replace, and its options; or why it cannot
- `data`: which data a script divides among the ranks
"""

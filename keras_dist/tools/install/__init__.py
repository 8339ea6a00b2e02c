"""Build Horovod for the installed TensorFlow: `keras-dist install-horovod`.

- `recipe`: take a wheel that fits, or build one; install it; what the installed one
  was built for
- `facts`: what this environment has, what is missing for a build, what to choose
- `build`: build a wheel: the source, our changes (`patches/`), flags and variables
- `steps`: run commands with a log, and show their errors
"""

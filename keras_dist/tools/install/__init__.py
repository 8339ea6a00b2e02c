"""Build Horovod for the installed TensorFlow: `keras-dist install-horovod`.

- `facts`: what this environment has: TensorFlow, compilers, MPI, CUDA, NCCL
- `requirements`: what is missing for a build, in one message
- `flags`: flags and environment variables of the build
- `patch`: our changes to Horovod's source (`patches/`), and whether a library has them
- `recipe`: take a wheel that was kept, or build one; install it, and see it work
- `build`: build a wheel
- `wheels`: wheels that are kept: their names, and whether one fits
- `installed`: the Horovod that is installed
- `steps`: the commands that are run, and their log
- `progress`: the line that shows how far the build is
- `failures`: the message about a step that failed, with a remedy if it is known
"""

from keras_dist.tools.install.failures import InstallError
from keras_dist.tools.install.recipe import install_horovod

__all__ = ["InstallError", "install_horovod"]

"""Cray PALS: `mpiexec` at ALCF, and on other machines of HPE with PBS."""

from typing import ClassVar

from keras_dist.clusters.numbered import MpiVariables


class Pals(MpiVariables):
    """`mpiexec` of Cray PALS, which also sets two of the variables of MPICH."""

    name: ClassVar[str] = "mpiexec (Cray PALS)"
    key: ClassVar[str] = "pals"
    variables = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")

"""Files beside the logs that state where ranks are: dumps, stacks, the load of GPUs.

Dumps of PyTorch's flight recorder (`recorder`), stacks of py-spy and faulthandler (`stacks`), and
tables of nvidia-smi (`gpus`). `files` reads them; patterns/auxiliary.py compares the ranks.
"""

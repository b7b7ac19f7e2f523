"""Files beside the logs that state where ranks are.

Dumps of PyTorch's flight recorder (`recorder`), stacks of py-spy and faulthandler (`stacks`), both
read by `files`; patterns/odd_stacks.py compares the ranks.
"""

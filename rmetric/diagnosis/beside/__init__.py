"""What lies beside the logs and states where ranks are.

Dumps of PyTorch's flight recorder (`recorder`), stacks of py-spy and faulthandler (`stacks`: read,
`owners`: of which rank, `places`: which stands elsewhere), and tables of the GPUs' load (`gpus`).
`findings` reads the files and gives the evidence in them.
"""

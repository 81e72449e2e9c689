"""States on storage, as torch.distributed.checkpoint reads them too: written by each place alone, read by any."""

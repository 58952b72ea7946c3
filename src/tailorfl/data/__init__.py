"""Sources, tables, partitions and federations of clients."""

"""`lorahost local-aws`: the AWS services that deployment uses, on this machine, around a real container."""

"""What transports over engines that read other machines' memory share: `nixl` and `mooncake`."""

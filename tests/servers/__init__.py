"""Real servers for the tests: one file each, all of them `relay.demo.processes.Server`s."""

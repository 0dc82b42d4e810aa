"""The jobs a user runs, one readable script each: `tune run NAME --config CONFIG`."""

"""Other libraries' names and signatures over epiloq's operations, one module a library."""

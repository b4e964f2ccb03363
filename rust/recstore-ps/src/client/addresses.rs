//! The servers of one shard, one of which leads it.

/// Stands between the addresses of one shard's servers.
const SEPARATOR: char = '|';

/// Where the servers of a shard are, the one that is called, and those to call if it does not lead.
#[derive(Debug, Clone)]
pub(super) struct Addresses {
    all: Vec<String>,
    current: usize,
}

impl Addresses {
    /// Takes one address, or several with a bar between them.
    pub(super) fn of(addresses: &str) -> Self {
        Self {
            all: addresses.split(SEPARATOR).map(|address| address.trim().to_owned()).collect(),
            current: 0,
        }
    }

    /// Returns the addresses as they were given.
    pub(super) fn joined(&self) -> String {
        self.all.join(&SEPARATOR.to_string())
    }

    pub(super) fn current(&self) -> &str {
        &self.all[self.current]
    }

    /// Returns all, the one that is called first.
    pub(super) fn in_turn(&self) -> Vec<String> {
        let (before, behind) = self.all.split_at(self.current);
        [behind, before].concat()
    }

    /// Calls the server at `address` from now on.
    pub(super) fn choose(&mut self, address: &str) {
        self.current = self.all.iter().position(|known| known == address).unwrap_or(self.current);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_that_is_called_comes_first() {
        let mut addresses = Addresses::of("a:1|b:2 | c:3");
        assert_eq!((addresses.current(), addresses.joined().as_str()), ("a:1", "a:1|b:2|c:3"));
        addresses.choose("b:2");
        assert_eq!(addresses.in_turn(), ["b:2", "c:3", "a:1"]);
        addresses.choose("d:4");
        assert_eq!(addresses.current(), "b:2");
        assert_eq!(Addresses::of("[::1]:5").in_turn(), ["[::1]:5"]);
    }
}

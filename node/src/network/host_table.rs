//! Rule sets of the host that all networks share. Each has a name, and a file with the fingerprints of what was applied,
//! so that a restart does not replace it.

use std::fs;

use muster_types::{Error, Result};

use super::netlink::NetlinkSocket;
use super::nftables::{self, NftFamily, NftTable, fingerprint};
use super::{Networks, dnsmasq_process, names, rules};

/// A rule set and what is known about it.
#[derive(Debug)]
pub(crate) struct HostTable {
    family: NftFamily,
    name: &'static str,
    /// The name of the file with the fingerprints.
    file: &'static str,
    /// Whether the file was loaded.
    loaded: bool,
    /// Fingerprints of the rule set's text and of the resulting table in the kernel.
    applied: Option<[u64; 2]>,
    /// The generation of the kernel's rule sets at the last comparison.
    generation: Option<u32>,
}

/// What [`HostTable::ensure`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableChange {
    /// The rule set was in force.
    None,
    /// The rule set was applied for the first time, or replaced by a new one.
    Updated,
    /// The rule set had been changed or deleted by another program.
    Repaired,
}

impl HostTable {
    pub(crate) const fn new(family: NftFamily, name: &'static str, file: &'static str) -> Self {
        Self { family, name, file, loaded: false, applied: None, generation: None }
    }

    /// Applies the rule set unless it is in force.
    pub(crate) fn ensure(&mut self, networks: &Networks, text: &str) -> Result<TableChange> {
        self.load();
        let generation = nftables::generation(&mut NetlinkSocket::netfilter()?)?;
        let wanted = fingerprint(text);
        let had_same_text = self.applied.is_some_and(|[applied, _]| applied == wanted);
        if self.generation == Some(generation) && had_same_text {
            return Ok(TableChange::None);
        }
        let found = self.find()?.map(|table| [wanted, table.fingerprint]);
        let in_force = found.is_some() && found == self.applied;
        if !in_force {
            networks.nft(text)?;
            let table = self.find()?.filter(|table| table.rules == rules::count_rules(text));
            self.applied = table.map(|table| [wanted, table.fingerprint]);
            self.save()?;
        }
        self.generation = Some(generation);
        Ok(match (in_force, had_same_text) {
            (true, _) => TableChange::None,
            (false, true) => TableChange::Repaired,
            (false, false) => TableChange::Updated,
        })
    }

    /// Removes the rule set, if it exists.
    pub(crate) fn remove(&mut self, networks: &Networks) -> Result<()> {
        *self = Self { loaded: true, ..Self::new(self.family, self.name, self.file) };
        self.save()?;
        if self.exists()? {
            networks.nft(&rules::delete_table(self.family.name(), self.name))
        } else {
            Ok(())
        }
    }

    pub(crate) fn exists(&self) -> Result<bool> {
        Ok(self.find()?.is_some())
    }

    fn find(&self) -> Result<Option<NftTable>> {
        let mut socket = NetlinkSocket::netfilter()?;
        Ok(nftables::tables(&mut socket, self.family, Some(self.name))?.remove(self.name))
    }

    fn load(&mut self) {
        if !self.loaded {
            // Without the file, the rules are applied again.
            let text = fs::read_to_string(names::runtime_dir().join(self.file)).unwrap_or_default();
            let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
            self.applied = numbers.try_into().ok();
            self.loaded = true;
        }
    }

    fn save(&self) -> Result<()> {
        let dir = names::runtime_dir();
        match self.applied {
            Some([text, table]) => {
                fs::create_dir_all(dir).map_err(|error| {
                    Error::Internal(format!("failed to create {}: {error}", dir.display()))
                })?;
                dnsmasq_process::write(dir, self.file, &format!("{text} {table}\n"))
            }
            None => {
                let _ = fs::remove_file(dir.join(self.file));
                Ok(())
            }
        }
    }
}

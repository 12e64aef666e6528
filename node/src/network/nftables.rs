//! Notices changes of rule sets without running a program.
//!
//! The kernel counts the changes of all rule sets of a namespace in one number. While it stands still nothing needs
//! a closer look. When it moved, the rule sets in question are read and compared by a fingerprint with what was
//! found right after they were put there. Rules with counters would change by themselves: there are none.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use muster_types::Result;

use super::netlink::{Request, Socket, attributes, text};

const SUBSYSTEM: u16 = 10 << 8;
const GET_TABLE: u16 = SUBSYSTEM | 1;
const GET_CHAIN: u16 = SUBSYSTEM | 4;
const GET_RULE: u16 = SUBSYSTEM | 7;
const GET_GENERATION: u16 = SUBSYSTEM | 16;

/// What kind of packets a table is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Ip = 2,
    Bridge = 7,
}

/// A table as the kernel has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) comment: String,
    pub(crate) fingerprint: u64,
    pub(crate) rules: usize,
}

/// A fingerprint of a text.
pub(crate) fn fingerprint(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// How often the rule sets of this thread's namespace have changed.
pub(crate) fn generation(socket: &mut Socket) -> Result<u32> {
    let answer = socket.get(GET_GENERATION, &Request::new(&[0; 4]))?.unwrap_or_default();
    let mut ids = attributes(answer.get(4..).unwrap_or_default()).filter(|(kind, _)| *kind == 1);
    let id = ids.next().and_then(|(_, value)| value.try_into().ok());
    Ok(id.map_or(0, u32::from_be_bytes))
}

/// The tables of a family, or only one of them.
pub(crate) fn tables(
    socket: &mut Socket,
    family: Family,
    only: Option<&str>,
) -> Result<HashMap<String, Table>> {
    let all = Request::new(&[family as u8, 0, 0, 0]);
    let one = || only.map_or_else(|| all.clone(), |name| all.clone().with_text(1, name));
    let mut hashers: HashMap<String, (Table, DefaultHasher)> = HashMap::new();
    let found = match only {
        Some(_) => socket.get(GET_TABLE, &one())?.into_iter().collect(),
        None => socket.dump(GET_TABLE, &all)?,
    };
    for payload in found {
        let (mut name, mut table, mut hasher) = (String::new(), Table::default(), DefaultHasher::new());
        for (kind, value) in attributes(payload.get(4..).unwrap_or_default()) {
            match kind {
                1 => name = text(value),
                6 => table.comment = comment(value),
                // The flags, of which one switches the table off, and the number that no other table ever gets.
                2 | 4 => (kind, value).hash(&mut hasher),
                _ => {}
            }
        }
        hashers.insert(name, (table, hasher));
    }
    if hashers.is_empty() {
        return Ok(HashMap::new());
    }
    let (chains, rules) = (socket.dump(GET_CHAIN, &all)?, socket.dump(GET_RULE, &one())?);
    let entries = chains.iter().map(|chain| (chain, 0)).chain(rules.iter().map(|rule| (rule, 1)));
    for (payload, count) in entries {
        let payload = payload.get(4..).unwrap_or_default();
        let table = attributes(payload).find(|(kind, _)| *kind == 1).map(|(_, value)| text(value));
        if let Some((table, hasher)) = table.and_then(|name| hashers.get_mut(&name)) {
            payload.hash(hasher);
            table.rules += count;
        }
    }
    let finish = |(name, (table, hasher)): (String, (Table, DefaultHasher))| {
        (name, Table { fingerprint: hasher.finish(), ..table })
    };
    Ok(hashers.into_iter().map(finish).collect())
}

/// The comment in the bytes that a table carries for its maker.
fn comment(mut data: &[u8]) -> String {
    while let [kind, length, rest @ ..] = data {
        let length = usize::from(*length).min(rest.len());
        if *kind == 0 {
            return text(&rest[..length]);
        }
        data = &rest[length..];
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_is_found_behind_other_data() {
        assert_eq!(comment(&[5, 2, 9, 9, 0, 3, b'h', b'i', 0]), "hi");
        assert_eq!(comment(&[0, 200, b'h']), "h");
        assert_eq!(comment(&[1]), "");
    }
}

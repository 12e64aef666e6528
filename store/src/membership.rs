//! The membership of this daemon in the cluster: the epochs of its nodes, and its clock. See docs/decisions/0050.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;

use muster_types::ids::NodeId;
use muster_types::time::now;
use muster_types::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::error::StoreError;
use crate::params;
use crate::row::Read;
use crate::transaction::{Tx, TxEngine};

/// The clock skew in seconds above which a daemon acquires no leases and creates no tokens.
pub const MAX_CLOCK_SKEW: f64 = 5.0;

/// A node of this daemon and the epoch under which it joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub node: NodeId,
    pub epoch: i64,
}

/// The nodes of this daemon that are members of the cluster, and the skew of its clock.
#[derive(Debug, Default)]
pub struct Membership {
    members: Mutex<Vec<Member>>,
    /// Why this daemon must stop: the last of its nodes was fenced.
    lost: watch::Sender<Option<String>>,
    clock_skew: Mutex<f64>,
}

impl Membership {
    /// Records that a node has joined under an epoch. From now on every transaction requires the epoch of a member.
    pub fn join(&self, member: Member) {
        let mut members = self.members.lock();
        members.retain(|other| other.node != member.node);
        members.push(member);
        self.lost.send_replace(None);
    }

    /// Records that a node has another epoch now, or was deleted. The daemon must stop when none remains.
    pub fn lose(&self, member: Member) {
        let mut members = self.members.lock();
        members.retain(|other| *other != member);
        let reason = format!(
            "node {} was deleted, fenced or started by another daemon since this daemon joined (epoch {})",
            member.node, member.epoch
        );
        tracing::error!(node = %member.node, epoch = member.epoch, "lost the membership of a node");
        if members.is_empty() {
            self.lost.send_if_modified(|lost| {
                let is_first = lost.is_none();
                lost.get_or_insert(reason);
                is_first
            });
        }
    }

    /// Returns the nodes that are members, in the order in which they joined.
    #[must_use]
    pub fn members(&self) -> Vec<Member> {
        self.members.lock().clone()
    }

    /// Returns whether a node of this daemon is a member. Before the daemon joins, every node counts as one.
    #[must_use]
    pub fn is_member(&self, node: NodeId) -> bool {
        let members = self.members.lock();
        members.iter().any(|member| member.node == node) || (members.is_empty() && self.reason().is_none())
    }

    fn reason(&self) -> Option<String> {
        self.lost.borrow().clone()
    }

    /// Returns a receiver of the reason why this daemon must stop.
    #[must_use]
    pub fn lost(&self) -> watch::Receiver<Option<String>> {
        self.lost.subscribe()
    }

    /// Rejects the call if this daemon must stop.
    pub fn require(&self) -> Result<()> {
        self.reason().map_or(Ok(()), |reason| Err(StoreError::StaleEpoch(reason).into()))
    }

    /// Records the time of the database, which was read between two times of this host. Returns the clock skew: that of all
    /// possible ones that is nearest to the last one. So a long round trip, while the database hangs, does not change it.
    pub fn observe_clock(&self, before: f64, database: f64, after: f64) -> f64 {
        let mut skew = self.clock_skew.lock();
        *skew = skew.clamp(before.min(after) - database, before.max(after) - database);
        *skew
    }

    /// Returns the seconds by which the clock of this host is ahead of that of the database.
    #[must_use]
    pub fn clock_skew(&self) -> f64 {
        *self.clock_skew.lock()
    }

    /// Returns the time of the database, computed from the clock of this host.
    #[must_use]
    pub fn database_time(&self) -> f64 {
        now() - self.clock_skew()
    }

    /// Rejects the call if the clock of this host is too far from that of the database.
    pub fn require_clock(&self) -> Result<()> {
        let skew = self.clock_skew();
        if skew.abs() <= MAX_CLOCK_SKEW {
            return Ok(());
        }
        let direction = if skew > 0.0 { "ahead of" } else { "behind" };
        Err(Error::Unavailable(format!(
            "the clock of this node is {:.1} seconds {direction} that of the database: synchronize the clocks of both \
             hosts (NTP), or use another node",
            skew.abs()
        )))
    }

    /// Rejects a transaction if no node of this daemon has the epoch under which it joined. MariaDB locks the row until
    /// the transaction ends, so that the node is not fenced between this check and the commit. A server that has not
    /// applied the start of the epoch yet is a conflict.
    pub async fn require_in(&self, tx: &mut Tx) -> Result<(), StoreError> {
        let lock = match tx.engine {
            TxEngine::Sqlite(_) => "",
            TxEngine::MariaDb(_) => " LOCK IN SHARE MODE",
        };
        let sql = format!("SELECT epoch FROM nodes WHERE uuid = ?{lock}");
        loop {
            let first = self.members.lock().first().copied();
            let Some(member) = first else {
                return self.reason().map_or(Ok(()), |reason| Err(StoreError::StaleEpoch(reason)));
            };
            let found: Option<i64> = tx.fetch_optional(&sql, params![member.node]).await?;
            match found.map(|epoch| epoch.cmp(&member.epoch)) {
                Some(Ordering::Equal) => return Ok(()),
                Some(Ordering::Greater) => self.lose(member),
                Some(Ordering::Less) | None => {
                    return Err(StoreError::Conflict("the database has an older epoch of this node".into()));
                }
            }
        }
    }
}

//! The leases of this daemon. One statement renews all of them. See docs/decisions/0063.

use std::time::{Duration, Instant};

use muster_store::Store;
use muster_store::leases::{self, LeaseOwner, Renewal};
use muster_types::Result;
use parking_lot::Mutex;

/// The leases that this daemon owns and renews.
#[derive(Debug, Default)]
pub struct OwnedLeases {
    leases: Mutex<Vec<OwnedLease>>,
}

#[derive(Debug)]
struct OwnedLease {
    renewal: Renewal,
    /// When the statement that renewed it was sent.
    renewed_at: Instant,
    /// When its task last needed it.
    needed_at: Instant,
}

impl OwnedLease {
    fn is(&self, name: &str, owner: &str) -> bool {
        self.renewal.name == name && self.renewal.owner == owner
    }

    /// Returns whether its task needed it lately. The lease of a task that hangs expires.
    fn is_needed(&self) -> bool {
        self.needed_at.elapsed().as_secs_f64() < self.renewal.seconds / 2.0
    }
}

impl OwnedLeases {
    /// Acquires a lease for `seconds`, or renews it with the other ones of this daemon, unless one of those was renewed with it
    /// during the last `max_age`. A lease of another owner is taken over if it still has the version `unrenewed`. Returns the time
    /// from which the seconds count, or `None` if another process owns the lease.
    pub(crate) async fn acquire(
        &self,
        store: &Store,
        name: &'static str,
        owner: &LeaseOwner,
        seconds: f64,
        max_age: Duration,
        unrenewed: Option<i64>,
    ) -> Result<Option<Instant>> {
        let sent_at = Instant::now();
        let renewals: Vec<Renewal> = {
            let mut leases = self.leases.lock();
            match leases.iter_mut().find(|lease| lease.is(name, &owner.id)) {
                None => Vec::new(),
                Some(own) => {
                    own.needed_at = sent_at;
                    if own.renewed_at.elapsed() <= max_age {
                        return Ok(Some(own.renewed_at));
                    }
                    let needed = leases.iter().filter(|lease| lease.is_needed());
                    needed.map(|lease| lease.renewal.clone()).collect()
                }
            }
        };
        if !renewals.is_empty() && leases::renew(store, &renewals).await {
            let is_renewed =
                |lease: &OwnedLease| renewals.iter().any(|renewal| lease.is(renewal.name, &renewal.owner));
            for lease in self.leases.lock().iter_mut().filter(|lease| is_renewed(lease)) {
                lease.renewed_at = lease.renewed_at.max(sent_at);
            }
            return Ok(Some(sent_at));
        }
        // This daemon does not own one of them, or the statement failed.
        self.forget(name, owner);
        let sent_at = Instant::now();
        if !leases::acquire_unrenewed(store, name, owner, seconds, unrenewed).await? {
            return Ok(None);
        }
        let renewal = Renewal { name, owner: owner.id.clone(), seconds };
        self.leases.lock().push(OwnedLease { renewal, renewed_at: sent_at, needed_at: sent_at });
        Ok(Some(sent_at))
    }

    /// Stops renewing a lease.
    pub(crate) fn forget(&self, name: &str, owner: &LeaseOwner) {
        self.leases.lock().retain(|lease| !lease.is(name, &owner.id));
    }

    /// Releases a lease if `owner` still owns it.
    pub(crate) async fn release(&self, store: &Store, name: &str, owner: &LeaseOwner) -> Result<()> {
        self.forget(name, owner);
        leases::release(store, name, owner).await
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use muster_store::membership::Member;
    use muster_store::{nodes, transaction};
    use muster_types::ids::NodeId;
    use muster_types::node::NodeIdentity;

    use super::*;

    /// Returns the database of a daemon with one node.
    async fn store(directory: &tempfile::TempDir) -> Store {
        let store = Store::open(&format!("sqlite:{}", directory.path().join("db").display())).await.unwrap();
        let identity = NodeIdentity {
            id: NodeId::new(),
            name: "n1".into(),
            ip: Ipv4Addr::LOCALHOST,
            release: String::new(),
            simulated: true,
            is_hypervisor: true,
            is_network_node: true,
            is_database_node: false,
        };
        let epoch = transaction!(store, |tx| {
            nodes::insert(tx, &identity).await?;
            Ok(nodes::begin_epoch(tx, identity.id, "lock file", store.schema_version()).await?)
        })
        .unwrap();
        store.membership.join(Member { node: identity.id, epoch });
        store
    }

    #[tokio::test]
    async fn renews_needed_leases_together() {
        let directory = tempfile::tempdir().unwrap();
        let (store, leases, owner) = (store(&directory).await, OwnedLeases::default(), LeaseOwner::new("n1"));
        let acquire = async |name, seconds, max_age| {
            leases.acquire(&store, name, &owner, seconds, max_age, None).await.unwrap().unwrap()
        };
        let (now, recent) = (Duration::ZERO, Duration::from_secs(30));
        let acquired = [acquire("one", 60.0, now).await, acquire("two", 60.0, now).await];
        // Its task is never known to need it, like one that hangs.
        let idle = acquire("idle", 0.0, now).await;
        assert_eq!(acquire("one", 60.0, recent).await, acquired[0], "acquired lately");

        let renewed = acquire("one", 60.0, now).await;
        assert!(renewed > acquired[1]);
        assert_eq!(acquire("two", 60.0, recent).await, renewed, "renewed with the other one");
        assert_eq!(acquire("idle", 0.0, recent).await, idle, "not renewed");

        let other = LeaseOwner::new("n2");
        leases.release(&store, "two", &owner).await.unwrap();
        assert!(leases::acquire(&store, "two", &other, 60.0).await.unwrap());
        acquire("one", 60.0, now).await;
        let lost = leases.acquire(&store, "two", &owner, 60.0, recent, None).await.unwrap();
        assert_eq!(lost, None, "another process owns it");
        assert_eq!(leases::owner_id(&store, "two").await.unwrap(), Some(other.id));
    }

    #[tokio::test]
    async fn keeps_a_lease_when_another_one_is_lost() {
        let directory = tempfile::tempdir().unwrap();
        let (store, leases, owner) = (store(&directory).await, OwnedLeases::default(), LeaseOwner::new("n1"));
        for name in ["kept", "lost"] {
            leases.acquire(&store, name, &owner, 60.0, Duration::ZERO, None).await.unwrap().unwrap();
        }
        leases::release(&store, "lost", &owner).await.unwrap();
        assert!(leases::acquire(&store, "lost", &LeaseOwner::new("n2"), 60.0).await.unwrap());
        for (name, is_owned) in [("kept", true), ("lost", false), ("kept", true)] {
            let renewed = leases.acquire(&store, name, &owner, 60.0, Duration::ZERO, None).await.unwrap();
            assert_eq!(renewed.is_some(), is_owned, "{name}");
        }
    }
}

use std::sync::Arc;

use super::{LeaseOwner, Renewal};
use muster_types::time::now;

use crate::membership::Member;
use crate::nodes::tests::identity;
use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn lease_has_one_owner_until_it_expires(store: Arc<Store>) {
        let (a, b) = (LeaseOwner::new("a"), LeaseOwner::new("b"));
        assert!(leases::acquire(&store, "job", &a, 60.0).await.unwrap());
        assert!(leases::acquire(&store, "job", &a, 60.0).await.unwrap(), "renewal");
        assert!(!leases::acquire(&store, "job", &b, 60.0).await.unwrap());
        assert_eq!(leases::owner_id(&store, "job").await.unwrap(), Some(a.id.clone()));
        leases::release(&store, "job", &b).await.unwrap();
        let nodes = async || leases::list(&store).await.unwrap().into_iter().map(|lease| lease.node).collect::<Vec<_>>();
        assert_eq!(nodes().await, ["a"]);
        assert!(leases::acquire(&store, "job", &a, -1.0).await.unwrap(), "expires immediately");
        assert!(nodes().await.is_empty());
        assert!(leases::acquire(&store, "job", &b, 60.0).await.unwrap());
        assert!(!leases::acquire(&store, "job", &a, 60.0).await.unwrap());
        leases::release(&store, "job", &b).await.unwrap();
        assert!(leases::list(&store).await.unwrap().is_empty());
    }

    async fn lease_is_taken_over_by_its_version_whatever_the_clock_says(store: Arc<Store>) {
        let (a, b) = (LeaseOwner::new("a"), LeaseOwner::new("b"));
        let acquire = async |owner, seconds, unrenewed| {
            leases::acquire_unrenewed(&store, "job", owner, seconds, unrenewed).await.unwrap()
        };
        let version = async || leases::all(&store).await.unwrap()[0].version;
        assert!(acquire(&a, -1.0, None).await);
        let first = version().await;
        assert!(!acquire(&b, 60.0, None).await, "expired by the clock of the database, but may have been renewed");
        assert!(acquire(&a, 1e6, None).await, "renewal");
        assert!(!acquire(&b, 60.0, Some(first)).await, "renewed since");
        assert!(acquire(&b, 60.0, Some(version().await)).await, "not renewed, whenever it expires");
        assert!(!acquire(&a, 60.0, None).await);
        leases::release(&store, "job", &b).await.unwrap();
        assert!(acquire(&a, 60.0, None).await, "released");
        let lease = &leases::all(&store).await.unwrap()[0];
        assert!(!lease.is_unlimited(now()) && lease.is_unlimited(now() - 1e9));
    }

    async fn one_statement_renews_several_leases(store: Arc<Store>) {
        let identity = identity("a");
        let epoch = transaction!(store, |tx| {
            nodes::insert(tx, &identity).await?;
            Ok(nodes::begin_epoch(tx, identity.id, "lock", store.schema_version()).await?)
        })
        .unwrap();
        let (a, b) = (LeaseOwner::new("a"), LeaseOwner::new("b"));
        let renewals = [("one", 100.0), ("two", 200.0)]
            .map(|(name, seconds)| Renewal { name, owner: a.id.clone(), seconds });
        assert!(leases::acquire(&store, "one", &a, 10.0).await.unwrap());
        assert!(leases::acquire(&store, "two", &a, 10.0).await.unwrap());
        assert!(!leases::renew(&store, &renewals).await, "the daemon has not joined");
        let member = Member { node: identity.id, epoch };
        store.membership.join(member);
        assert!(leases::renew(&store, &renewals).await);
        for (renewal, lease) in renewals.iter().zip(leases::list(&store).await.unwrap()) {
            let remaining = lease.expires - now();
            assert!((renewal.seconds - remaining).abs() < 60.0, "{}: {remaining}", renewal.name);
        }

        assert!(leases::acquire(&store, "two", &a, -1.0).await.unwrap());
        assert!(leases::acquire(&store, "two", &b, 60.0).await.unwrap());
        assert!(!leases::renew(&store, &renewals).await, "another process owns one of them");
        assert_eq!(leases::owner_id(&store, "two").await.unwrap(), Some(b.id));
        assert!(leases::renew(&store, &renewals[..1]).await);
        transaction!(store.unfenced(), |tx| { Ok(nodes::fence(tx, identity.id).await?) }).unwrap();
        assert!(!leases::renew(&store, &renewals[..1]).await, "the node was fenced");
    }

    async fn one_of_many_acquires_a_new_lease(store: Arc<Store>) {
        let mut tasks = Vec::new();
        for n in 0..8 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                leases::acquire(&store, "job", &LeaseOwner::new(&n.to_string()), 60.0).await.unwrap()
            }));
        }
        let mut won = 0;
        for task in tasks {
            won += usize::from(task.await.unwrap());
        }
        assert_eq!(won, 1);
    }
}

use std::sync::Arc;

use super::LeaseOwner;
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

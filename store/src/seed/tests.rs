use std::sync::Arc;

use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn only_the_first_seed_matches(store: Arc<Store>) {
        let (mine, other) = (muster_types::key::Secret::new("mine"), muster_types::key::Secret::new("other"));
        assert!(seed::matches_cluster(&store, &mine).await.unwrap());
        assert!(seed::matches_cluster(&store, &mine).await.unwrap());
        assert!(!seed::matches_cluster(&store, &other).await.unwrap());
    }
}

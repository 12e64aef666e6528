//! What the cluster forgets of exchanges, and when.

use muster_control::reconcile;
use muster_testing::Issuer;
use muster_types::time::now;

use super::{USED, World};

#[tokio::test(flavor = "multi_thread")]
async fn tokens_and_counts_are_forgotten_when_they_are_over_everywhere() {
    let world = World::with(Issuer::start(), &[("FEDERATION_RATE_LIMIT_PER_MINUTE", "1000")]).await;
    let token = world.token();
    assert_eq!(world.exchange(&token).await.status, 200);
    let left = async || {
        while reconcile::cleaner::run(&world.cluster.app).await.unwrap() {}
        let count = |table| world.cluster.count(table, "1 = 1");
        (count("exchanged_tokens").await, count("exchange_attempts").await)
    };
    assert_eq!(left().await, (1, 1));
    world.refused(&token, USED, "not forgotten").await;
    // Over here, but perhaps not for a daemon whose clock is behind.
    world.execute(&format!("UPDATE exchanged_tokens SET expires = {}", now() - 200.0)).await;
    world.execute("UPDATE exchange_attempts SET minute = minute - 3").await;
    assert_eq!(left().await, (1, 1));
    world.execute(&format!("UPDATE exchanged_tokens SET expires = {}", now() - 301.0)).await;
    world.execute("UPDATE exchange_attempts SET minute = minute - 4").await;
    assert_eq!(left().await, (0, 0));
}

//! Removal of expired exchange records.

use muster_control::reconcile;
use muster_testing::Issuer;
use muster_types::time::now;

use super::{Fixture, TOKEN_USED};

#[tokio::test(flavor = "multi_thread")]
async fn removes_tokens_and_counts_after_clock_skew_margin() {
    let fixture = Fixture::with(Issuer::start(), &[("FEDERATION_RATE_LIMIT_PER_MINUTE", "1000")]).await;
    let token = fixture.token();
    assert_eq!(fixture.exchange(&token).await.status, 200);
    let clean_and_count = async || {
        while reconcile::cleaner::run(&fixture.cluster.app).await.unwrap() {}
        let count = |table| fixture.cluster.count_rows(table, "1 = 1");
        (count("exchanged_tokens").await, count("exchange_attempts").await)
    };
    assert_eq!(clean_and_count().await, (1, 1));
    fixture.assert_refused(&token, TOKEN_USED, "the exchange is still recorded").await;
    // Expired here, but possibly not for a daemon whose clock is behind.
    fixture.execute_sql(&format!("UPDATE exchanged_tokens SET expires = {}", now() - 200.0)).await;
    fixture.execute_sql("UPDATE exchange_attempts SET minute = minute - 3").await;
    assert_eq!(clean_and_count().await, (1, 1));
    fixture.execute_sql(&format!("UPDATE exchanged_tokens SET expires = {}", now() - 301.0)).await;
    fixture.execute_sql("UPDATE exchange_attempts SET minute = minute - 4").await;
    assert_eq!(clean_and_count().await, (0, 0));
}

use std::sync::Arc;

use super::{Union, width};
use crate::testing::on_both_engines;
use crate::*;

on_both_engines! {
    async fn union_keeps_types_of_each_part(store: Arc<Store>) {
        let time = 1_763_384_402.123_456_7_f64;
        transaction!(store, |tx| {
            tx.execute("CREATE TABLE union_numbers (n BIGINT, r DOUBLE, t LONGTEXT)", &[]).await?;
            let text = "ü\u{1f600}\"'\n".repeat(20_000);
            for values in [params![i64::MAX, time, &text], params![-1i64, 1e-300, None::<String>]] {
                tx.execute("INSERT INTO union_numbers (n, r, t) VALUES (?, ?, ?)", values).await?;
            }
            Ok(())
        }).unwrap();
        let mut union = Union::default();
        let numbers = union.add("n, r, t", "FROM union_numbers WHERE n > ?".into(), params![0i64]);
        let swapped = union.add("r, n", "FROM union_numbers WHERE n = ?".into(), params![-1i64]);
        let none = union.add("t", "FROM union_numbers WHERE n = ?".into(), params![7i64]);
        let mut rows = union.fetch(&*store).await.unwrap();
        let found: Vec<(i64, f64, Option<String>)> = rows.take(numbers).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0, found[0].1), (i64::MAX, time));
        assert_eq!(found[0].2.as_ref().unwrap().len(), "ü\u{1f600}\"'\n".len() * 20_000);
        assert_eq!(rows.take::<(f64, i64)>(swapped).unwrap(), [(1e-300, -1)]);
        assert_eq!(rows.take::<String>(none).unwrap(), Vec::<String>::new());
    }
}

#[test]
fn counts_columns_outside_of_parentheses() {
    assert_eq!(width("a"), 1);
    assert_eq!(width("a, COALESCE(b, 0), (SELECT MAX(c, d) FROM e)"), 3);
}

//! Parts of lists: `limit`, `sort` and `filter`, which every list accepts. See docs/decisions/0087.

use serde_json::Value;

use super::client::Client;
use super::error::Result;
use super::response::ApiResponse;
use super::uri::extend_query;

/// The maximum number of records of a page.
const MAX_PAGE: u32 = 1000;

/// Selects a part of a list. The default is the whole list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListQuery {
    /// The maximum number of records.
    pub limit: Option<u32>,
    /// The field that the list is sorted by, with `-` in front for descending order.
    pub sort: Option<String>,
    /// Conditions such as `state:created`, all of which must be met.
    pub filter: Vec<String>,
}

impl Client {
    /// Returns the first records of a list whose path is given, for their names.
    pub(crate) async fn names(&self, path: &str) -> Result<Value> {
        let query = ListQuery { limit: Some(MAX_PAGE), ..ListQuery::default() };
        self.get_list::<Value>(path.to_owned(), &query).await.map(|list| list.json().clone())
    }

    /// Returns a list, page by page.
    pub(super) async fn get_list<T>(&self, path: String, query: &ListQuery) -> Result<ApiResponse<Vec<T>>> {
        if *query == ListQuery::default() {
            return self.get(path).await;
        }
        let mut records = vec![];
        let mut cursor: Option<String> = None;
        loop {
            let remaining =
                query.limit.map(|limit| limit.saturating_sub(u32::try_from(records.len()).unwrap_or(limit)));
            let limit = remaining.map(|remaining| remaining.min(MAX_PAGE).to_string());
            let mut parameters = vec![];
            parameters.extend(limit.as_deref().map(|limit| ("limit", limit)));
            parameters.extend(query.sort.as_deref().map(|sort| ("sort", sort)));
            parameters.extend(query.filter.iter().map(|filter| ("filter", filter.as_str())));
            parameters.extend(cursor.as_deref().map(|cursor| ("cursor", cursor)));
            let raw = self
                .send_authenticated(reqwest::Method::GET, &extend_query(path.clone(), parameters), None)
                .await?;
            let page = self.decode::<Vec<T>>(&raw)?;
            match page.json() {
                Value::Array(page) => records.extend(page.iter().cloned()),
                _ => return Err(self.unexpected_response("a list that is not an array")),
            }
            cursor = raw.next_cursor;
            let is_complete = query.limit.is_some_and(|limit| records.len() >= limit as usize);
            if cursor.is_none() || is_complete {
                return Ok(ApiResponse::new(Value::Array(records)));
            }
        }
    }
}

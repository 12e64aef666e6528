//! Lists. Long ones are read and sent page by page, so that a list never has to fit into memory. A request may ask for a
//! part of any list; see [`lists`].

use std::marker::PhantomData;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use muster_types::Error;
use serde::Serialize;

use crate::error::ApiResult;
use crate::lists::{self, ListRequest, PageKey};
use crate::response::{Documented, Json, JsonBody, Success, streamed_json};

/// Initial capacity of a page's buffer per record, in bytes.
const RECORD_CAPACITY: usize = 160;

/// A JSON array of `T`, or the part of it that the request asks for.
#[derive(Debug)]
pub(crate) struct Pages<T> {
    response: Response,
    record: PhantomData<fn() -> T>,
}

impl<T> IntoResponse for Pages<T> {
    fn into_response(self) -> Response {
        self.response
    }
}

impl<T: JsonBody> Documented for Pages<T> {
    fn success() -> Option<Success> {
        let success = Success::json::<Vec<T>>(StatusCode::OK, "Success.");
        Some(Success { is_list: true, ..success })
    }
}

impl<T: Serialize> Pages<T> {
    /// Returns a list that was read completely.
    pub(crate) fn of(records: Vec<T>) -> ApiResult<Self> {
        let response = match lists::requested() {
            None => Json(records).into_response(),
            Some(list) => list.respond(&list.select_from(&records)?)?,
        };
        Ok(Self { response, record: PhantomData })
    }

    /// Returns a part of a list that is read in pages.
    pub(crate) async fn select<K, F, P>(list: &ListRequest, read: F) -> ApiResult<Self>
    where
        K: PageKey,
        F: Fn(Option<K>) -> P,
        P: Future<Output = Result<(Vec<T>, Option<K>), Error>>,
    {
        let selected = list.select(read).await?;
        Ok(Self { response: list.respond(&selected)?, record: PhantomData })
    }
}

/// Sends every page that `read` returns. `read` takes the key to continue after and returns the key of the next page.
pub(crate) async fn in_pages<T, K, F, P>(read: F) -> ApiResult<Pages<T>>
where
    T: Serialize + Send + 'static,
    K: PageKey,
    F: Fn(Option<K>) -> P + Send + Sync + 'static,
    P: Future<Output = Result<(Vec<T>, Option<K>), Error>> + Send + 'static,
{
    if let Some(list) = lists::requested() {
        return Pages::select(&list, read).await;
    }
    // The first page is read before the response starts, so that a failure still sets the status.
    let (records, next) = read(None).await?;
    if next.is_none() {
        return Ok(Pages { response: Json(records).into_response(), record: PhantomData });
    }
    let pages = stream::try_unfold((Some((records, next)), true, read), |(page, first, read)| async move {
        let Some((records, next)) = page else { return Ok::<_, Error>(None) };
        let mut bytes = Vec::with_capacity(records.len() * RECORD_CAPACITY);
        for (at, record) in records.iter().enumerate() {
            bytes.push(if first && at == 0 { b'[' } else { b',' });
            serde_json::to_writer(&mut bytes, record).map_err(|e| Error::Internal(e.to_string()))?;
        }
        let page = match next {
            Some(after) => Some(read(Some(after)).await?),
            None => {
                bytes.extend_from_slice(b"]\n");
                None
            }
        };
        Ok(Some((Bytes::from(bytes), (page, false, read))))
    });
    Ok(Pages { response: streamed_json(Body::from_stream(pages)), record: PhantomData })
}
